# SPDX-License-Identifier: Apache-2.0
"""`tessera eval` and `tessera calibrate`: how well a model answers over reused chunks."""
