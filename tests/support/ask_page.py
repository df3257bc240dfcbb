# SPDX-License-Identifier: Apache-2.0
"""The page's view Ask."""

from playwright.sync_api import Page

ANSWER = "The access code of Falcon is 7342."
HOSTILE = "<img src=x onerror='window.hacked=1'><script>window.hacked=1</script>"


def drop(page: Page, selector: str, name: str, content: str) -> None:
    page.evaluate(
        """([selector, name, content]) => {
            const dataTransfer = new DataTransfer();
            dataTransfer.items.add(new File([content], name));
            for (const type of ["dragover", "drop"])
                document.querySelector(selector).dispatchEvent(new DragEvent(type, {dataTransfer, bubbles: true}));
        }""",
        [selector, name, content],
    )
