# SPDX-License-Identifier: Apache-2.0
"""`tessera doctor`: would chunks be reused here, with this model and these flags, and if not, what to do."""
