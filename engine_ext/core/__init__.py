# SPDX-License-Identifier: Apache-2.0
"""Inside vLLM's processes: the KV connector's scheduler half and worker half, layers and copies."""
