# SPDX-License-Identifier: Apache-2.0
"""API keys, roles, and the limits of clients and tenants."""
