# SPDX-License-Identifier: Apache-2.0
"""`tessera bench`: ratios to stock vLLM, measured side by side in one run over HTTP."""
