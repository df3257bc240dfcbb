# SPDX-License-Identifier: Apache-2.0
"""Replicas as a cluster: the router, registration, and chunks of other replicas."""
