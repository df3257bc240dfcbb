# SPDX-License-Identifier: Apache-2.0
"""From a request's documents to the segments of its prompt."""
