# SPDX-License-Identifier: Apache-2.0
"""A cluster of replicas: router, registration, and chunks fetched from other replicas."""
