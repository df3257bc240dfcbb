# SPDX-License-Identifier: Apache-2.0
"""A cluster simulated with a synthetic clock: what `benchmarks/cluster_simulation.py` runs."""
