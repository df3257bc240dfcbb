# SPDX-License-Identifier: Apache-2.0
"""`tessera doctor`: checks whether chunks would be reused with this machine, model and flags."""
