"""A process that would wait for ten minutes, as one that `FreshProcess` starts."""

import time

from pipeline.fresh_process import end_with_parent

if __name__ == "__main__":
    end_with_parent()
    time.sleep(600)
