# SPDX-License-Identifier: Apache-2.0
"""The registry: claims of replicas on documents, and the choice of a replica for a request."""
