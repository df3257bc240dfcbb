# SPDX-License-Identifier: Apache-2.0
"""Who may do what, and how much of it: API keys, roles, and the limits of each tenant."""
