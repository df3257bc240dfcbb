# SPDX-License-Identifier: Apache-2.0
"""Where the demo model is. `training/` makes it; its card is the README.md in its folder."""

from pathlib import Path

DEMO_MODEL = Path(__file__).resolve().parents[2] / "models" / "demo"
