# SPDX-License-Identifier: Apache-2.0
"""The FastAPI application: HTTP, settings, command line, prompt rendering."""
