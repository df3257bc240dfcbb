# SPDX-License-Identifier: Apache-2.0
"""One request with chunks: prepared, composed, reported."""
