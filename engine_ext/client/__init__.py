# SPDX-License-Identifier: Apache-2.0
"""The engine client: one request over chunks, computing ahead, adapters."""
