#!/usr/bin/env python3
"""bench/pages.py shows figures whose sources are those that were measured, and no others.

    pages_test.py ROOT"""
import json, os, subprocess, sys, tempfile, unittest
ROOT = os.path.abspath(sys.argv.pop(1))
BEGIN, END = '<!-- bench/pages.py writes the lines from here -->\n', '<!-- to here -->\n'

class Pages(unittest.TestCase):
    def setUp(self):
        folder = tempfile.TemporaryDirectory()
        self.addCleanup(folder.cleanup)
        self.root = folder.name
        self.git('init', '-q')
        self.put('comm/ring.cpp', 'int ring;\n')
        self.put('tensor/sum.cpp', 'int sum;\n')
        self.git('add', '-A')
        self.git('commit', '-q', '-m', 'all')
        self.commit = self.git('rev-parse', '--short=8', 'HEAD')
        for page in ('README.md', 'docs/performance.md'): self.put(page, f'before\n{BEGIN}old\n{END}after\n')
        self.put('points.json', json.dumps([dict(collective='all_reduce', bytes=b, ranks=2, us=dict(ours=b)) for b in (8, 64)]))
        result = lambda source: dict(commit='', date='', state='', sources=[source])
        figure = lambda name, source: dict(what=name, ours='1 µs', beside='2 µs', machine='a machine', command=f'time_{name} -n 2', **result(source))
        self.results = dict(figures=[figure('rings', 'comm'), figure('sums', 'tensor')],
                            plots=[dict(file='docs/plots/rings.svg', results='points.json', alternative='Rings', caption='Two rings.', **result('comm'))])
        self.put('bench/results/figures.json', json.dumps(self.results))
        for what in ('rings', 'sums'): self.assertEqual(self.run_pages('--measured', what).returncode, 0)

    def git(self, *words):
        who = ['-c', 'user.name=test', '-c', 'user.email=test@example.org']
        return subprocess.run(['git', '-C', self.root, *who, *words], check=True, text=True, capture_output=True).stdout.strip()

    def put(self, name, text):
        path = os.path.join(self.root, name)
        os.makedirs(os.path.dirname(path), exist_ok=True)
        with open(path, 'w') as f: f.write(text)

    def page(self, name='docs/performance.md'):
        with open(os.path.join(self.root, name)) as f: return f.read()

    def run_pages(self, *words):
        return subprocess.run([sys.executable, f'{ROOT}/bench/pages.py', self.root, *words], text=True, capture_output=True)

    def write(self):
        p = self.run_pages()
        self.assertEqual((p.returncode, p.stderr), (0, ''))

    def test_current_figures_are_shown_with_their_commands(self):
        self.write()
        page = self.page()
        for row in ('| rings | 1 µs | 2 µs |', '| sums | 1 µs | 2 µs |', '    # rings\n    time_rings -n 2\n'): self.assertIn(row, page)
        self.assertTrue(page.startswith(f'before\n{BEGIN}') and page.endswith(f'{END}after\n'), page)
        self.assertNotIn('old', page)
        self.assertIn('<img src="docs/plots/rings.svg"', self.page('README.md'))
        self.assertIn('<svg', self.page('docs/plots/rings.svg'))
        self.assertEqual(self.run_pages('--check').returncode, 0)

    def test_a_change_of_its_sources_leaves_out_a_figure_and_a_plot(self):
        self.write()
        self.put('comm/ring.cpp', 'long ring;\n')
        p = self.run_pages('--check')
        self.assertEqual(p.returncode, 1)
        self.assertIn('docs/performance.md, README.md, docs/plots/rings.svg', p.stderr)
        self.write()
        self.assertNotIn('| rings |', self.page())
        self.assertIn('| sums |', self.page())
        self.assertIn('time_rings', self.page())
        self.assertNotIn('<img', self.page('README.md'))
        self.assertFalse(os.path.exists(os.path.join(self.root, 'docs/plots/rings.svg')))
        self.assertEqual(self.run_pages('--check').returncode, 0)
        self.assertEqual(self.run_pages('--measured', 'rings').returncode, 0)
        self.assertIn(f'| rings | 1 µs | 2 µs | `{self.commit}`', self.page())

    def test_a_new_file_of_its_sources_leaves_out_a_figure(self):
        self.put('comm/tree.cpp', 'int tree;\n')
        self.write()
        self.assertNotIn('| rings |', self.page())

    def test_without_a_current_figure_the_page_says_so(self):
        for name in ('comm/ring.cpp', 'tensor/sum.cpp'): self.put(name, 'long other;\n')
        self.write()
        self.assertIn('measure with the commands below', self.page())
        self.assertNotIn('|', self.page())

    def test_comments_and_blank_lines_are_no_change(self):
        self.put('comm/ring.cpp', '// A ring.\n\nint ring;\n')
        self.write()
        self.assertIn('| rings |', self.page())

    def test_what_is_wrong_is_named(self):
        def refused(*words):
            p = self.run_pages('--check')
            self.assertEqual(p.returncode, 2)
            for word in words: self.assertIn(word, p.stderr)
        self.put('README.md', 'no marks\n')
        refused('README.md', BEGIN.strip())
        self.assertIn('no figure or plot', self.run_pages('--measured', 'trees').stderr)
        self.results['figures'][0]['sources'] = ['no_such_room']
        self.put('bench/results/figures.json', json.dumps(self.results))
        refused('no sources no_such_room')

if __name__ == '__main__': unittest.main()
