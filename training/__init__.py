# SPDX-License-Identifier: Apache-2.0
"""Training: the demo model, and models that learn to answer from isolated chunks."""
