# SPDX-License-Identifier: Apache-2.0
"""Path of the demo model. `research/demo_model` makes it; its card is the README.md in its folder."""

from pathlib import Path

DEMO_MODEL = Path(__file__).resolve().parents[2] / "models" / "demo"
