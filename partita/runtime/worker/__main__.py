"""The program of a worker process: `python -m partita.runtime.worker MODULE FOLDER`. See `child`."""

from partita.runtime.worker.child import main

main()
