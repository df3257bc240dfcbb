# SPDX-License-Identifier: Apache-2.0
"""The web page: static files that use only the public HTTP interface."""
