# SPDX-License-Identifier: Apache-2.0
"""Values that cross between the app and vLLM's processes; names that moved in vLLM."""
