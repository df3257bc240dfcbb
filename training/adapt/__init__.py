# SPDX-License-Identifier: Apache-2.0
"""`tessera adapt`: an adapter for writing chunks, taught by the model's own full attention."""
