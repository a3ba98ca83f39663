#!/usr/bin/env python3
"""bench/check_all.py and bench/against_peers.py: their commands, their reports, and one-line errors.

    bench_scripts_test.py ROOT BIN"""
import json, os, stat, subprocess, sys, tempfile, unittest
BIN, ROOT = os.path.abspath(sys.argv.pop(2)), os.path.abspath(sys.argv.pop(1))

# A tool that finds a wrong result in one of two rows, and a peer that needs a second for every call.
WRONG = '''#!/usr/bin/env python3
import json, sys
row = lambda n: dict(out_of_place=dict(time=1, nwrong=n), in_place=dict(time=1, nwrong=None))
json.dump(dict(results=[row(0), row(3)]), open(sys.argv[sys.argv.index('-J') + 1], 'w'))
sys.exit(7)
'''
PEER = '''#!/usr/bin/env python3
import os
for op in os.environ['BENCH_OPS'].split(','):
    for size in os.environ['BENCH_SIZES'].split(','): print(f'ROW,{os.environ["BENCH_PEER"]},2,{op},{size},10,1e6,1e6,2e6,1e6,0')
'''

class Scripts(unittest.TestCase):
    def setUp(self):
        self.folder = tempfile.TemporaryDirectory()
        self.addCleanup(self.folder.cleanup)

    def program(self, name, text):
        path = f'{self.folder.name}/{name}'
        with open(path, 'w') as f: f.write(text)
        os.chmod(path, os.stat(path).st_mode | stat.S_IXUSR)
        return path

    def run_script(self, name, *words):
        return subprocess.run([sys.executable, f'{ROOT}/bench/{name}.py', *words], capture_output=True, text=True)

    def expect_refusal(self, name, words, *parts):
        p = self.run_script(name, *words)
        self.assertEqual((p.returncode, p.stdout, p.stderr.count('\n')), (2, '', 1), p.stderr)
        for part in parts: self.assertIn(part, p.stderr)

    def test_every_type_and_reduction_is_checked(self):
        table = f'{self.folder.name}/table.json'
        p = self.run_script('check_all', '--bin', BIN, '--ranks', '1,3', '--sizes', '4000', '--collectives', 'all_reduce,gather', '--registered', '0', '--json', table)
        self.assertEqual((p.returncode, p.stderr), (0, ''))
        with open(table) as f: rows = json.load(f)['rows']
        self.assertEqual([(r['collective'], r['ranks'], r['checked'], r['wrong']) for r in rows],
                         [('all_reduce', 1, 144, 0), ('all_reduce', 3, 144, 0), ('gather', 1, 24, 0), ('gather', 3, 24, 0)])
        self.assertIn('336 results on 1, 3 ranks', p.stdout)

    def test_a_wrong_result_is_an_exit_status(self):
        self.program('all_reduce_perf', WRONG)
        p = self.run_script('check_all', '--bin', self.folder.name, '--ranks', '2', '--sizes', '8', '--collectives', 'all_reduce', '--registered', '0', '--launch', '')
        self.assertEqual(p.returncode, 7, p.stderr)
        self.assertIn('2 results checked, 1 wrong', p.stdout)

    def test_a_tool_that_fails_ends_it(self):
        self.program('all_reduce_perf', '#!/bin/sh\necho no luck >&2\nexit 1\n')
        p = self.run_script('check_all', '--bin', self.folder.name, '--collectives', 'all_reduce', '--launch', '')
        self.assertEqual(p.returncode, 1)
        self.assertIn('no luck', p.stderr)

    def test_what_check_all_refuses(self):
        self.expect_refusal('check_all', ['--ranks', '0'], '--ranks', '0 is less than 1')
        self.expect_refusal('check_all', ['--sizes', 'many'], '--sizes', "'many'")
        self.expect_refusal('check_all', ['--collectives', 'all_to_none'], "'all_to_none'", 'all_reduce, ')
        self.expect_refusal('check_all', ['--bin', self.folder.name], 'all_reduce_perf', 'tools/build.sh')

    def test_a_table_that_cannot_be_written_is_an_error_at_once(self):
        for name, words in (('check_all', []), ('against_peers', ['--ranks', '2', '--peers', 'a=false'])):
            self.expect_refusal(name, [*words, '--bin', BIN, '--json', '/nowhere/table.json'], '--json /nowhere/table.json: cannot be written: No such file')
        table = f'{self.folder.name}/table.json'
        with open(table, 'w') as f: f.write('an earlier one')
        self.assertNotEqual(self.run_script('against_peers', '--ranks', '2', '--peers', 'a=false', '--bin', BIN, '--sizes', '8', '--json', table).returncode, 0)
        self.assertEqual(os.path.getsize(table), 0)

    def test_peers_are_held_against_ours(self):
        table = f'{self.folder.name}/table.json'
        peer = self.program('peer', PEER)
        p = self.run_script('against_peers', '--bin', BIN, '--ranks', '2', '--rounds', '1', '--sizes', '8,4096', '--collectives', 'all_reduce,broadcast,scatter',
                            '--peers', f'slow={peer}', '--json', table)
        self.assertEqual((p.returncode, p.stderr), (0, ''))
        with open(table) as f: rows = json.load(f)
        self.assertEqual([(r['collective'], r['bytes']) for r in rows], [(c, s) for c in ('all_reduce', 'all_reduce in place', 'broadcast in place', 'scatter') for s in (8, 4096)])
        for r in rows:
            self.assertEqual((r['us']['slow'], r['p99']['slow']), (1e6, 2e6))
            self.assertLessEqual(r['us']['ours'], r['p99']['ours'])
            self.assertEqual((r['ratio'], r['p99_ratio']), (1e6 / r['us']['ours'], 2e6 / r['p99']['ours']))

    def test_what_against_peers_refuses(self):
        self.expect_refusal('against_peers', ['--ranks', '2'], '--peers')
        self.expect_refusal('against_peers', ['--ranks', '2', '--peers', 'absent'], '--peers')
        self.expect_refusal('against_peers', ['--ranks', '2', '--peers', 'a=b', '--collectives', 'sendrecv'], "'sendrecv'", 'all_reduce, ')
        self.expect_refusal('against_peers', ['--ranks', '2', '--peers', 'a=b', '--bin', self.folder.name], 'all_reduce_perf')

if __name__ == '__main__': unittest.main()
