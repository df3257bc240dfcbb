# SPDX-License-Identifier: Apache-2.0
"""Tools that know nothing of Tessera's engine or server: processes, progress, folders, versions."""
