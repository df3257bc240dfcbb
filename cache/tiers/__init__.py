# SPDX-License-Identifier: Apache-2.0
"""Storage of chunk KV beside the pool: host memory, directories, object stores."""
