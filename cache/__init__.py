# SPDX-License-Identifier: Apache-2.0
"""All cache state of one replica: keys, pages, layouts, leases. Pure Python: tokens, no tensors."""
