# SPDX-License-Identifier: Apache-2.0
"""``tessera route``: one address for many replicas."""
