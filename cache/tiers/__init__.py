# SPDX-License-Identifier: Apache-2.0
"""Where chunk KV is kept beside the pool: host memory, directories, object stores."""
