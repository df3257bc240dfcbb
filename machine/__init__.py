# SPDX-License-Identifier: Apache-2.0
"""The machine that a command runs on: its processes, terminal, folders and processor. Knows nothing else of Tessera."""
