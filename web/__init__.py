# SPDX-License-Identifier: Apache-2.0
"""The web page: static files that use nothing but the public HTTP interface."""
