# SPDX-License-Identifier: Apache-2.0
"""Values that cross between the app's process and vLLM's, and names that moved between vLLM's versions."""
