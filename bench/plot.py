#!/usr/bin/env python3
"""Draws latency and bus bandwidth over size as SVG: a row per collective and number of ranks, logarithmic axes, ours beside peers and the lower bound.

    plot.py FILE[=LABEL]... [--out FILE.svg] [--what latency,busbw] [--collectives all_reduce,...] [--only ours,mpich,...] [--title TEXT]

FILE is JSON of one of these kinds:
  - a _perf program (-J): out of place and in place
  - bench/lower_bound_bench --json and bench/against_lower_bound.py --json
  - a list of {"collective": NAME, "bytes": N, "ranks": N, "us": {SERIES: MICROSECONDS, ...}}, where "ours" is one of the series and the others
    are peers; NAME may end in " in-place"
LABEL replaces "ours" as the name of our curves in that file, to compare builds. If files share a series, the points of the last file count.

--what         the columns; default both
--collectives  the rows to draw, e.g. all_reduce,all_reduce in-place; default all
--only         the series to draw; default all
--out          default: standard output
Latency is the median if the file has one (lower bound, --percentiles), otherwise the mean time."""
import argparse, json, math, sys
from xml.sax.saxutils import escape

# The colour-blind-safe colours of Okabe and Ito, without yellow, which is invisible on white.
BLUE, SKY, VERMILION, GREEN, PURPLE, ORANGE, BLACK, GREY = '#0072B2', '#56B4E9', '#D55E00', '#009E73', '#CC79A7', '#E69F00', '#222222', '#7F7F7F'
KNOWN = {'ours': (BLUE, 'circle', ''), 'ours -R 2': (SKY, 'circle', ''), 'bound': (BLACK, '', '6 4'), 'bound -R 2': (GREY, '', '6 4'),
         'bound staged': (BLACK, '', '6 4'), 'bound mapped': (GREY, '', '6 4')}
MARKED = [(VERMILION, 'square'), (GREEN, 'triangle'), (PURPLE, 'diamond'), (ORANGE, 'down'), (BLACK, 'square'), (SKY, 'triangle')]
OTHERS = [(colour, shape, dashes) for dashes in ('', '2 3') for colour, shape in MARKED]
HEADINGS = {'latency': 'time of a call', 'busbw': 'bus bandwidth, GB/s'}
WIDTH, HEIGHT, LEFT, RIGHT, ABOVE, BELOW, TOP, GAP = 400, 250, 64, 112, 54, 34, 58, 14
INK, PALE, FAINT = '#333333', '#D9D9D9', '#F0F0F0'

def fail(line):
    print(f'plot.py: {line}', file=sys.stderr)
    sys.exit(2)

class Parser(argparse.ArgumentParser):
    def error(self, message): fail(message + '; see --help')

# ---- input files

def bus_factor(collective, ranks):
    if collective == 'all_reduce': return 2 * (ranks - 1) / ranks
    return (ranks - 1) / ranks if collective in ('reduce_scatter', 'all_gather', 'alltoall', 'alltoallv', 'gather', 'scatter') else 1

def of_perf(j, ours):
    """Points: (collective, in place?, ranks, series, bytes, us)."""
    for r in j['results']:
        for place in ('out_of_place', 'in_place'):
            f = r[place]
            yield j['collective'], place == 'in_place', len(j['config']['devices']), ours, r['size'], f.get('percentiles', {}).get('p50', f['time'])

def of_bound(j, ours):
    for r in j['rows']:
        yield 'all_reduce', r['method'].endswith('in_place'), j['ranks'], 'bound ' + r['method'].split('_')[0], r['size'], r['median']

def of_against(j, ours):
    for r in j['rows']:
        more = '' if r['memory'] == 'ordinary' else ' -R 2'
        for series, us in (('bound', r['lower_bound_us']), (ours, r['ours_us'])):
            yield r['collective'], r['place'] == 'in_place', j['ranks'], series + more, r['bytes'], us

def of_list(j, ours):
    for r in j:
        name, in_place = r['collective'].removesuffix(' in-place'), r['collective'].endswith(' in-place')
        for series, us in r['us'].items(): yield name, in_place, r['ranks'], ours if series == 'ours' else series, r['bytes'], us

def reader(j):
    if isinstance(j, list): return of_list
    return {'lower_bound_bench': of_bound, 'against_lower_bound': of_against}.get(j.get('tool'), of_perf if 'results' in j else None) if isinstance(j, dict) else None

def read(word):
    path, _, label = word.partition('=')
    try:
        with open(path) as f: j = json.load(f)
        points = list(reader(j)(j, label or 'ours'))
    except OSError as e: fail(f'{path}: {e.strerror}')
    except (ValueError, KeyError, TypeError, AttributeError): fail(f'{path}: not JSON of a kind that --help names')
    return [p for p in points if p[5] > 0]

def panels_of(points, o):
    """{(collective, in place?, ranks): {series: {bytes: us}}}, in the files' order."""
    panels = {}
    for collective, in_place, ranks, series, size, us in points:
        if o.collectives and collective + (' in-place' if in_place else '') not in o.collectives: continue
        if o.only and series not in o.only: continue
        panels.setdefault((collective, in_place, ranks), {}).setdefault(series, {})[size] = us
    return panels

# ---- texts and numbers

def trimmed(x): return f'{x:.3g}' if x < 1000 else f'{x:.0f}'

def size_text(b):
    for unit in ('B', 'KiB', 'MiB', 'GiB'):
        if b < 1024 or unit == 'GiB': return f'{trimmed(b)} {unit}'
        b /= 1024

def time_text(us): return f'{trimmed(us)} µs' if us < 1e3 else f'{trimmed(us / 1e3)} ms' if us < 1e6 else f'{trimmed(us / 1e6)} s'

def steps(low, high):
    """1, 2, 5, 10, ... from at most `low` to at least `high`."""
    all = [m * 10.0 ** e for e in range(math.floor(math.log10(low)) - 1, math.ceil(math.log10(high)) + 2) for m in (1, 2, 5)]
    first = max(i for i, v in enumerate(all) if v <= low * (1 + 1e-9))
    last = min(i for i, v in enumerate(all) if v >= high * (1 - 1e-9))
    return all[first:max(last, first + 1) + 1]

def is_decade(v): return abs(math.log10(v) - round(math.log10(v))) < 1e-9

# ---- drawing

class Axis:
    def __init__(self, low, high, begin, end): self.low, self.high, self.begin, self.end = math.log(low), math.log(high), begin, end
    def __call__(self, v):
        return self.begin + (math.log(v) - self.low) / (self.high - self.low) * (self.end - self.begin) if self.high > self.low else (self.begin + self.end) / 2

def line(x1, y1, x2, y2, colour, width=1, more=''):
    return f'<line x1="{x1:.1f}" y1="{y1:.1f}" x2="{x2:.1f}" y2="{y2:.1f}" stroke="{colour}" stroke-width="{width}"{more}/>'

def text(x, y, words, size=11, anchor='start', colour=INK, weight='normal'):
    return f'<text x="{x:.1f}" y="{y:.1f}" font-size="{size}" text-anchor="{anchor}" fill="{colour}" font-weight="{weight}">{escape(words)}</text>'

def marker(shape, x, y, colour):
    corners = {'square': [(-3, -3), (3, -3), (3, 3), (-3, 3)], 'triangle': [(0, -4), (3.8, 3), (-3.8, 3)], 'down': [(0, 4), (3.8, -3), (-3.8, -3)],
               'diamond': [(0, -4.4), (4.4, 0), (0, 4.4), (-4.4, 0)]}.get(shape)
    if corners: return f'<polygon points="{" ".join(f"{x + a:.1f},{y + b:.1f}" for a, b in corners)}" fill="{colour}" stroke="white" stroke-width="0.8"/>'
    return f'<circle cx="{x:.1f}" cy="{y:.1f}" r="3.4" fill="{colour}" stroke="white" stroke-width="0.8"/>' if shape else ''

def spread(wanted, low, high, gap):
    """Heights at least `gap` apart, in the order of the wanted heights and as close to them as possible (least squares)."""
    order = sorted(range(len(wanted)), key=lambda i: wanted[i])
    gap = min(gap, (high - low) / max(len(order) - 1, 1))
    groups = []  # [sum, count] of labels that touch, each height minus the gaps above it
    for rank, i in enumerate(order):
        groups.append([wanted[i] - rank * gap, 1])
        while len(groups) > 1 and groups[-2][0] / groups[-2][1] >= groups[-1][0] / groups[-1][1]:
            last = groups.pop()
            groups[-1] = [groups[-1][0] + last[0], groups[-1][1] + last[1]]
    level = [total / count for total, count in groups for _ in range(count)]
    placed = [0.0] * len(wanted)
    for rank, i in enumerate(order): placed[i] = min(max(level[rank], low), high - (len(order) - 1) * gap) + rank * gap
    return placed

def grid(x, y, sizes, ticks, what):
    out, last = [], -1e9
    many = sum(is_decade(t) for t in ticks) >= 3
    for t in ticks:
        labelled = is_decade(t) or not many
        out.append(line(x.begin, y(t), x.end, y(t), PALE if labelled else FAINT))
        if labelled: out.append(text(x.begin - 8, y(t) + 4, time_text(t) if what == 'latency' else trimmed(t), anchor='end'))
    for s in sizes:
        out.append(line(x(s), y.begin, x(s), y.begin + 4, INK))
        if x(s) - last < 46: continue
        last = x(s)
        out.append(text(x(s), y.begin + 18, size_text(s), anchor='middle'))
    return out + [line(x.begin, y.begin, x.end, y.begin, INK)]

def curve(points, style, wide):
    colour, shape, dashes = style
    path = ' '.join(f'{a:.1f},{b:.1f}' for a, b in points)
    dash = f' stroke-dasharray="{dashes}"' if dashes else ''
    out = [f'<polyline points="{path}" fill="none" stroke="{colour}" stroke-width="{2.6 if wide else 1.6}" stroke-linejoin="round"{dash}/>']
    return out + [marker(shape, a, b, colour) for a, b in points]

def panel(series, styles, factor, what, left, top):
    value = (lambda size, us: us) if what == 'latency' else (lambda size, us: size * factor / (us * 1e3))
    values = {name: {s: value(s, us) for s, us in sorted(points.items())} for name, points in series.items()}
    sizes, all = sorted({s for v in values.values() for s in v}), [x for v in values.values() for x in v.values()]
    ticks = steps(min(all), max(all))
    x, y = Axis(sizes[0], sizes[-1], left + LEFT + 10, left + LEFT + WIDTH - 10), Axis(ticks[0], ticks[-1], top + HEIGHT, top)
    out = [text(left + LEFT, top - 12, HEADINGS[what], 12)] + grid(x, y, sizes, ticks, what)
    ends = {}
    for name in sorted(values, key=lambda n: n.startswith('ours')):  # draw ours last, on top
        points = [(x(s), y(v)) for s, v in values[name].items()]
        out += curve(points, styles[name], name.startswith('ours'))
        ends[name] = points[-1]
    heights = spread([p[1] for p in ends.values()], top + 4, top + HEIGHT - 4, 15)
    at = left + LEFT + WIDTH + 8
    for (name, (a, b)), h in zip(ends.items(), heights):
        colour, shape, dashes = styles[name]
        out.append(line(a + 5, b, at, h, colour, 0.7, ' opacity="0.6"'))
        out.append(line(at, h, at + 20, h, colour, 2, f' stroke-dasharray="{dashes}"' if dashes else '') + marker(shape, at + 10, h, colour))
        out.append(text(at + 25, h + 4, name))
    return out

def styles_of(panels, labels):
    styles, free = {}, iter(OTHERS * 9)
    names = dict.fromkeys(n for p in panels.values() for n in p)
    if 'ours' not in names and labels and labels[-1] in names: styles[labels[-1]] = KNOWN['ours']  # the newest of our builds
    for n in names:
        if n not in styles: styles[n] = KNOWN.get(n) or next(free)
    return styles

def draw(panels, o):
    styles, columns = styles_of(panels, [w.partition('=')[2] for w in o.files if '=' in w]), o.what
    row, column = ABOVE + HEIGHT + BELOW + GAP, LEFT + WIDTH + RIGHT
    width, height = column * len(columns) + GAP, TOP + row * len(panels) + GAP
    out = [f'<svg xmlns="http://www.w3.org/2000/svg" width="{width}" height="{height}" viewBox="0 0 {width} {height}" '
           'font-family="Helvetica Neue, Helvetica, Arial, Liberation Sans, sans-serif" role="img">',
           f'<title>{escape(o.title)}</title>', f'<rect width="{width}" height="{height}" fill="white"/>', text(16, 32, o.title, 18, weight='bold')]
    for i, ((collective, in_place, ranks), series) in enumerate(panels.items()):
        top = TOP + i * row
        out.append(text(16, top + 16, f'{collective}{", in place" if in_place else ""}, {ranks} rank{"s" if ranks != 1 else ""}', 14, weight='bold'))
        for c, what in enumerate(columns): out += panel(series, styles, bus_factor(collective, ranks), what, c * column, top + ABOVE)
    return '\n'.join(out + ['</svg>']) + '\n'

def options():
    a = Parser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    a.add_argument('files', nargs='+', metavar='FILE[=LABEL]'); a.add_argument('--out'); a.add_argument('--what', default='latency,busbw')
    a.add_argument('--collectives', default=''); a.add_argument('--only', default=''); a.add_argument('--title', default='Collectives over size')
    o = a.parse_args()
    for name in ('what', 'collectives', 'only'): setattr(o, name, [w for w in getattr(o, name).split(',') if w])
    if not o.what or set(o.what) - set(HEADINGS): fail(f"--what: {','.join(o.what) or 'nothing'} must be of latency, busbw")
    return o

def main():
    o = options()
    panels = panels_of([p for word in o.files for p in read(word)], o)
    if not panels: fail(f'{", ".join(o.files)}: nothing to draw' + (' of what --collectives and --only leave' if o.collectives or o.only else ''))
    svg = draw(panels, o)
    if not o.out: return sys.stdout.write(svg)
    try:
        with open(o.out, 'w') as f: f.write(svg)
    except OSError as e: fail(f'--out {o.out}: {e.strerror}')

if __name__ == '__main__': main()
