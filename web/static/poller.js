// SPDX-License-Identifier: Apache-2.0
// Asks again and again while the tab is looked at, less often while the server is away.

export class Poller {
  /** `ask` is an async function; `everyMs` from one answer to the next question, `longestMs` while it fails. */
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

  /** Asks at once, and from then on. */
  async now() {
    clearTimeout(this.timer);
    if (document.hidden || this.isAsking) return; // when it is seen again, now() is called
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
