# SPDX-License-Identifier: Apache-2.0
"""Starting an engine: support, fingerprint, default strategy, self-check."""
