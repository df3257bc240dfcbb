# SPDX-License-Identifier: Apache-2.0
"""vLLM's side of Tessera: the KV connector, the worker extension, and the engine client around ``AsyncLLM``."""
