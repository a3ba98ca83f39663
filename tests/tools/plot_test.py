#!/usr/bin/env python3
"""bench/plot.py: its input, its layout, and one-line errors.

    plot_test.py ROOT"""
import json, os, subprocess, sys, tempfile, unittest
import xml.etree.ElementTree as xml
ROOT = os.path.abspath(sys.argv.pop(1))
sys.path.insert(0, f'{ROOT}/bench')
sys.dont_write_bytecode = True
import plot

PEERS = [dict(collective=c, bytes=b, ranks=2, us=dict(mpich=b / 100, ours=b / 400), ratio=4) for c in ('all_reduce', 'all_reduce in-place', 'all_gather')
         for b in (8, 1024, 1 << 20)]
PERF = dict(version=3, collective='broadcast', config=dict(devices=[{}, {}, {}]),
            results=[dict(size=64, out_of_place=dict(time=2.5), in_place=dict(time=2.0, percentiles=dict(p50=1.5)))])
BOUND = dict(tool='lower_bound_bench', ranks=2, rows=[dict(size=8, method='mapped_in_place', median=0.25)])
AGAINST = dict(tool='against_lower_bound', ranks=2, rows=[dict(collective='all_reduce', bytes=8, memory=m, place='out_of_place', lower_bound_us=1, ours_us=2)
                                                   for m in ('ordinary', 'symmetric')])

class Plot(unittest.TestCase):
    def setUp(self):
        self.folder = tempfile.TemporaryDirectory()
        self.addCleanup(self.folder.cleanup)

    def file(self, content):
        path = f'{self.folder.name}/{len(os.listdir(self.folder.name))}.json'
        with open(path, 'w') as f: f.write(content if isinstance(content, str) else json.dumps(content))
        return path

    def run_plot(self, *words):
        return subprocess.run([sys.executable, f'{ROOT}/bench/plot.py', *words], capture_output=True, text=True)

    def draw(self, *words):
        p = self.run_plot(*words)
        self.assertEqual((p.returncode, p.stderr), (0, ''))
        return xml.fromstring(p.stdout)

    def words_in(self, svg): return [t.text for t in svg.iter('{http://www.w3.org/2000/svg}text')]
    def curves_in(self, svg): return [(c.get('stroke'), len(c.get('points').split())) for c in svg.iter('{http://www.w3.org/2000/svg}polyline')]

    def test_reads_every_kind(self):
        read = lambda content, label='': plot.read(self.file(content) + label)
        self.assertEqual(read(PERF), [('broadcast', False, 3, 'ours', 64, 2.5), ('broadcast', True, 3, 'ours', 64, 1.5)])
        self.assertEqual(read(BOUND), [('all_reduce', True, 2, 'bound mapped', 8, 0.25)])
        self.assertEqual(read(AGAINST, '=new'), [('all_reduce', False, 2, 'bound', 8, 1), ('all_reduce', False, 2, 'new', 8, 2),
                                                 ('all_reduce', False, 2, 'bound -R 2', 8, 1), ('all_reduce', False, 2, 'new -R 2', 8, 2)])
        self.assertEqual(read(PEERS)[6:8], [('all_reduce', True, 2, 'mpich', 8, 0.08), ('all_reduce', True, 2, 'ours', 8, 0.02)])

    def test_ticks_are_round_and_hold_all_values(self):
        self.assertEqual(plot.steps(0.3, 42), [0.2, 0.5, 1, 2, 5, 10, 20, 50])
        self.assertEqual(plot.steps(1, 10), [1, 2, 5, 10])
        self.assertEqual(plot.steps(5, 5), [5, 10])
        self.assertEqual([plot.size_text(b) for b in (8, 1024, 1536, 4 << 20, 1 << 30)], ['8 B', '1 KiB', '1.5 KiB', '4 MiB', '1 GiB'])
        self.assertEqual([plot.time_text(t) for t in (0.1, 10, 1000, 2e6)], ['0.1 µs', '10 µs', '1 ms', '2 s'])

    def test_an_axis_is_logarithmic(self):
        axis = plot.Axis(1, 100, 0, 200)
        self.assertEqual([round(axis(v), 9) for v in (1, 10, 100)], [0, 100, 200])
        self.assertEqual(plot.Axis(8, 8, 0, 200)(8), 100)

    def test_labels_keep_their_distance_and_their_order(self):
        self.assertEqual(plot.spread([50, 10, 90], 0, 100, 15), [50, 10, 90])
        self.assertEqual(plot.spread([50, 50], 0, 100, 15), [42.5, 57.5])
        self.assertEqual(plot.spread([99, 100, 40], 0, 100, 15), [85, 100, 40])
        self.assertEqual(plot.spread([2, 1, 3], 0, 100, 10), [10, 0, 20])
        self.assertEqual(plot.spread([5] * 5, 0, 20, 15), [0, 5, 10, 15, 20])

    def test_bus_bandwidth_has_its_factor(self):
        self.assertEqual([plot.bus_factor(c, 4) for c in ('all_reduce', 'reduce_scatter', 'broadcast')], [1.5, 0.75, 1])

    def test_a_row_a_collective_and_a_curve_a_series(self):
        svg = self.draw(self.file(PEERS), '--title', 'here & <there>')
        words = self.words_in(svg)
        for w in ('here & <there>', 'all_reduce, 2 ranks', 'all_reduce, in place, 2 ranks', 'all_gather, 2 ranks', '8 B', '1 KiB', '1 MiB', 'mpich', 'ours'):
            self.assertIn(w, words)
        self.assertEqual(len(self.curves_in(svg)), 3 * 2 * 2)
        self.assertEqual({n for _, n in self.curves_in(svg)}, {3})
        self.assertEqual(words.count('bus bandwidth, GB/s'), 3)

    def test_draws_what_was_asked_for(self):
        svg = self.draw(self.file(PEERS), '--what', 'latency', '--collectives', 'all_reduce in-place', '--only', 'ours')
        self.assertEqual(self.curves_in(svg), [(plot.BLUE, 3)])
        self.assertNotIn('mpich', self.words_in(svg))

    def test_builds_beside_each_other(self):
        before, after = self.file(PEERS) + '=before', self.file(PEERS) + '=after'
        svg = self.draw(before, after, '--what', 'busbw', '--collectives', 'all_gather')
        self.assertEqual(len(self.curves_in(svg)), 3)
        self.assertEqual(len({c for c, _ in self.curves_in(svg)}), 3)
        self.assertIn(plot.BLUE, {c for c, _ in self.curves_in(svg)})

    def test_writes_a_file(self):
        out = f'{self.folder.name}/out.svg'
        self.assertEqual(self.run_plot(self.file(AGAINST), '--out', out).stdout, '')
        self.assertEqual(len(self.curves_in(xml.parse(out).getroot())), 2 * 4)

    def test_what_it_cannot_draw_is_one_line(self):
        good = self.file(PEERS)
        for words, message in [(['/nowhere.json'], 'No such file'), ([self.file('{')], 'not JSON of a kind'), ([self.file({})], 'not JSON of a kind'),
                            ([self.file([dict(bytes=8)])], 'not JSON of a kind'), ([self.file([])], 'nothing to draw'), ([], 'FILE'),
                            ([good, '--only', 'absent'], 'nothing to draw of what'), ([good, '--what', 'heat'], '--what: heat'),
                            ([good, '--nope'], '--nope'), ([good, '--out', '/nowhere/x.svg'], '--out /nowhere/x.svg')]:
            p = self.run_plot(*words)
            self.assertEqual((p.returncode, p.stdout, p.stderr.count('\n')), (2, '', 1), p.stderr)
            self.assertTrue(p.stderr.startswith('plot.py: '), p.stderr)
            self.assertIn(message, p.stderr)

if __name__ == '__main__': unittest.main()
