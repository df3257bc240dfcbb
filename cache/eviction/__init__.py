# SPDX-License-Identifier: Apache-2.0
"""Why segments leave the pool: room, quotas, expiry."""
