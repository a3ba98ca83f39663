"""Files for the results of the programs in bench/: created or emptied before the work. So one that cannot be written is an error
at once, status 2, and results of an earlier run do not outlive the beginning of this one."""
import os, sys


def _empty(flag, given, folder, files):
    try:
        if folder: os.makedirs(folder, exist_ok=True)
        for file in files: open(file, 'w').close()
    except OSError as e:
        print(f'{os.path.basename(sys.argv[0])}: {flag} {given}: cannot be written: {e.strerror}', file=sys.stderr)
        sys.exit(2)


def empty(flag, path):
    """The file of a flag that may not be given."""
    if path: _empty(flag, path, None, [path])


def empty_in_folder(flag, folder, *names):
    """Files of the folder of a flag that may not be given, which is made."""
    if folder: _empty(flag, folder, folder, [os.path.join(folder, name) for name in names])
