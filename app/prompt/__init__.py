# SPDX-License-Identifier: Apache-2.0
"""Conversion of a request's documents to the segments of its prompt."""
