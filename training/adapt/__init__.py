# SPDX-License-Identifier: Apache-2.0
"""`tessera adapt`: a model learns to answer from isolated chunks, taught by its own full attention."""
