# SPDX-License-Identifier: Apache-2.0
"""Models that Tessera brings along or downloads."""
