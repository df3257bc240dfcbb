#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# Installs the clients and apps of docs/integrations in environments of their own: in Tessera's they would replace vLLM's
# OpenAI client by an older one. What can't be installed is said, and its tests are skipped.
set -uo pipefail
cd "$(dirname "$0")/.."

for app in integrations open-webui; do
    [ -d ".venv-$app" ] || "${VENV:-.venv}/bin/python" -m venv ".venv-$app"
    echo "installing scripts/$app-requirements.txt into .venv-$app"
    ".venv-$app/bin/python" -m pip install --quiet --disable-pip-version-check -r "scripts/$app-requirements.txt" ||
        echo "it can't be installed: its tests will be skipped"
done
npm install --silent --no-save --prefix .venv-integrations ai@6 @ai-sdk/openai@3 @ai-sdk/openai-compatible@2 ||
    echo "Vercel's AI SDK can't be installed (npm): its test will be skipped"
