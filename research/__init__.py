# SPDX-License-Identifier: Apache-2.0
"""Programs that answered a question about Tessera (README.md); no part of the product, and not in its wheel."""
