#!/usr/bin/env python3
"""The tables at the head of comm/core/environment.h have the variables that are read, and no others: the launchers' rows are
those of comm/bootstrap/launch_info.cpp, all names those of the lists in comm/core/environment.cpp.

    environment_table_test.py ROOT"""
import os, re, sys, unittest
ROOT = os.path.abspath(sys.argv.pop(1))

def read(name):
    with open(os.path.join(ROOT, name), encoding='utf-8') as f: return f.read()

def table_rows():
    """The cells of each row of the tables; a row ends with '|' at the end of its last line."""
    head = read('comm/core/environment.h').split('#include')[0]
    text = re.sub(r'\n///   +', ' ', head)
    return [[cell.strip() for cell in line[4:].strip('| ').split('|')] for line in text.split('\n') if line.startswith('/// |')]

def names_in(text): return re.findall(r'\b[A-Z][A-Z0-9]*(?:_[A-Za-z0-9_]+)?\b', text)

class Table(unittest.TestCase):
    def test_rows_of_launchers_are_those_of_launch_info(self):
        code = re.search(r'launchers\(\) \{.*?\n\}', read('comm/bootstrap/launch_info.cpp'), re.S)[0]
        sets = r',\s*\{([^{}]*)\}' * 4
        wanted = {name: [re.findall(r'"(\w+)"', s) for s in columns] for name, *columns in re.findall(r'\{"(\w+)"' + sets + r'\}', code)}
        self.assertGreater(len(wanted), 8)
        rows = table_rows()
        begin = rows.index(['launcher', 'rank', 'size', 'local rank', 'local size'])
        found = {}
        for row in rows[begin + 2:begin + 2 + len(wanted)]: found[row[0]] = [cell.split(' or ') if cell else [] for cell in (row[1:] + [''])[:4]]
        self.assertEqual(found, wanted)

    def test_all_variables_are_there_and_no_others(self):
        code = read('comm/core/environment.cpp')
        lists = [re.search(rf'string_view {name} =\n(.*?);', code, re.S)[1] for name in ('variables', 'variables_of_job')]
        listed = {n for text in lists for part in re.findall(r'"([^"]*)"', text) for n in part.split()}
        self.assertGreater(len(listed), 100)
        header = read('comm/core/environment.h')
        members = set(re.findall(r'/// ((?:RZ|NCCL)_\w+)(?: \(.*?\))?:', header))
        columns = {n for row in table_rows() for n in names_in(' '.join(row[1:] if row[0].islower() else row[:1]))}
        self.assertEqual(listed - members - columns, set(), 'read, and not in the tables')
        self.assertEqual((columns & {n for n in columns if '_' in n}) - listed, set(), 'in the tables, and not read')

if __name__ == '__main__': unittest.main()
