// SPDX-License-Identifier: Apache-2.0
// Polls while the tab is visible, less often while the server is unreachable.

export class Poller {
  /** `ask`: async function; `everyMs`: pause after a success; `longestMs`: maximum pause after failures. */
  constructor(ask, { everyMs, longestMs, onFailure }) {
    this.ask = ask;
    this.everyMs = everyMs;
    this.longestMs = longestMs;
    this.onFailure = onFailure;
    this.delayMs = everyMs;
    this.timer = null;
    this.isAsking = false;
    document.addEventListener("visibilitychange", () => this.now());
  }

  /** Polls immediately, then repeatedly. */
  async now() {
    clearTimeout(this.timer);
    if (document.hidden || this.isAsking) return; // now() runs when the tab becomes visible
    this.isAsking = true;
    try {
      await this.ask();
      this.delayMs = this.everyMs;
    } catch (error) {
      this.delayMs = Math.min(2 * this.delayMs, this.longestMs);
      this.onFailure(error, this.delayMs);
    } finally {
      this.isAsking = false;
    }
    if (!document.hidden) this.timer = setTimeout(() => this.now(), this.delayMs);
  }
}
