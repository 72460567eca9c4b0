"""Frame times of the page of large schedules in a headless Chromium, at three zooms.

python -m benchmarks.page_frames
"""

from __future__ import annotations

import tempfile
from pathlib import Path

from tests.support.browser import Browser, find_browser
from tests.unit.schedule.test_page import schedule_of

_MEASURE = """(async () => {
  const found = [], quantile = (v, p) => v.sort((a, b) => a - b)[Math.floor(v.length * p)];
  for (const share of [1, 0.3, 0.05]) {
    const span = page.data.stepSeconds * share, gaps = [];
    page.stats.milliseconds.length = 0;
    for (let i = 0, last = performance.now(); i < 60; i++) {
      const from = page.data.stepSeconds * 0.004 * i;
      page.show(from, from + span * (1 - 0.001 * i));
      await new Promise(done => requestAnimationFrame(done));
      gaps.push(performance.now() - last);
      last = performance.now();
    }
    found.push([share, quantile(page.stats.milliseconds, 0.5), quantile(gaps, 0.5), quantile(gaps, 0.95)]);
  }
  return found;
})()"""


def main() -> None:
    """Print one row per schedule and zoom."""
    binary = find_browser()
    if binary is None:
        raise SystemExit("No Chromium is installed: apt-get install chromium.")
    print("| operations | shown | drawing | frame, median | frame, 95th of 100 |\n|--:|--:|--:|--:|--:|")
    with tempfile.TemporaryDirectory() as folder:
        browser = Browser(binary, Path(folder) / "profile")
        for micro_batches in (4, 8):
            schedule = schedule_of(126, micro_batches)
            browser.open(schedule.to_html(Path(folder) / "page.html"))
            for share, drawing, median, late in browser.run(_MEASURE):
                times = " | ".join(f"{t:.1f} ms" for t in (drawing, median, late))
                print(f"| {len(schedule.step.ops):,} | {share:.0%} | {times} |")
        browser.close()


if __name__ == "__main__":
    main()
