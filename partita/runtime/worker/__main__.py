"""The program of a worker process: `python -m partita.runtime.worker MODULE FOLDER READER`. See `child`."""

from partita.runtime.worker.child import main

main()
