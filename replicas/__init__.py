# SPDX-License-Identifier: Apache-2.0
"""The replicas' registry of documents, and the choice of a replica for a request."""
