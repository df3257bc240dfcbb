# SPDX-License-Identifier: Apache-2.0
"""HTTP without documents: bodies, refusals, event streams, the schema of answers."""
