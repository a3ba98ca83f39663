#!/usr/bin/env python3
"""Writes unicode.inc, the properties of characters that tokenizers distinguish, of Unicode 16.0.0: that of the regular
expressions of Hugging Face's tokenizers 0.23.3. With the packages regex 2024.11.6 and unicodedataplus 16.0.0.

    python3 make_unicode.py >unicode.inc

PROPERTY(names, runs): for each run of characters that have the property how many lie between it and the one before,
and how many it has beyond its first, both in hexadecimal. UNION(names, parts): those of several properties. Names are
upper case, without blanks, hyphens and underscores, as Oniguruma compares them."""
import textwrap
import regex
import unicodedataplus as unicode

CODES = [code for code in range(0x110000) if not 0xD800 <= code < 0xE000]
TEXT = ''.join(map(chr, CODES))
BINARY = '''OtherAlphabetic OtherUppercase OtherLowercase WhiteSpace ASCIIHexDigit HexDigit Dash Diacritic Emoji EmojiComponent
    EmojiModifier EmojiModifierBase EmojiPresentation ExtendedPictographic Extender Ideographic UnifiedIdeograph JoinControl
    Math QuotationMark Radical RegionalIndicator SentenceTerminal SoftDotted TerminalPunctuation VariationSelector
    DefaultIgnorableCodePoint NoncharacterCodePoint PatternSyntax PatternWhiteSpace'''.upper().split()
# Beyond those of the Unicode Character Database: Oniguruma's names, which are POSIX's in brackets but for PUNCT.
UNIONS = {'C OTHER': 'CC CF CN CO CS', 'L LETTER': 'LU LL LT LM LO', 'LC CASEDLETTER': 'LU LL LT',
          'M MARK COMBININGMARK': 'MN MC ME', 'N NUMBER': 'ND NL NO', 'P PUNCTUATION PUNCT': 'PC PD PS PE PI PF PO',
          'S SYMBOL': 'SM SC SK SO', 'Z SEPARATOR': 'ZS ZL ZP', 'ALPHABETIC ALPHA': 'L NL OTHERALPHABETIC',
          'UPPERCASE UPPER': 'LU OTHERUPPERCASE', 'LOWERCASE LOWER': 'LL OTHERLOWERCASE', 'CASED': 'UPPERCASE LOWERCASE LT', 'ALNUM': 'ALPHABETIC ND',
          'WORD': 'ALPHABETIC M ND PC', 'POSIXPUNCT': 'P S', 'GRAPH': 'L M N P S CF CO', 'PRINT': 'GRAPH ZS',
          'ASSIGNED': 'L M N P S Z CC CF CO CS', 'UNKNOWN ZZZZ': 'CN CO CS'}
ALIASES = {'CC': 'CNTRL', 'ND': 'DIGIT', 'WHITESPACE': 'SPACE', 'ASCIIHEXDIGIT': 'XDIGIT'}

def is_of(code, version):
    return unicode.age(chr(code)) != 'Unassigned' and tuple(map(int, unicode.age(chr(code)).split('.'))) <= version

def matches(expression):
    return map(ord, regex.findall(expression, TEXT, regex.V1 | regex.DOTALL))

def write(names, codes):
    runs, last = [], -1
    for code in sorted(codes):
        if runs and code == last + 1:
            runs[-1][1] += 1
        else:
            runs.append([code - last - 1, 0])
        last = code
    text = ' '.join(f'{gap:x} {more:x}' for gap, more in runs)
    lines = textwrap.wrap(f'PROPERTY("{names}", "{text}")', 116, drop_whitespace=False)
    print('"\n"'.join(lines))

def main():
    assert unicode.unidata_version == '16.0.0' and regex.match(r'\p{Lu}', '\U00010D50'), 'other versions of the packages'
    print('// Unicode 16.0.0, made by make_unicode.py.')
    all_names, properties = set(), regex._regex.get_properties()
    for key in ('GC', 'SCRIPT'):
        by_value = {}
        for name, value in properties[key][1].items():
            by_value.setdefault(value, []).append(name)
        for names in by_value.values():
            names = sorted(set(names) - {'CNTRL', 'DIGIT', 'PUNCT'}, key=lambda name: (len(name), name))
            if names[0] not in {name for union in UNIONS for name in union.split()} | {'CS', 'L&', 'HRKT'}:
                write_named(all_names, names, matches(r'\p{%s=%s}' % (key, names[0])))
    for name in BINARY:
        names = [other for other in properties if properties[other][0] == properties[name][0]]
        write_named(all_names, names, matches(r'\p{%s=Yes}' % name))
    write('CS SURROGATE', range(0xD800, 0xE000))
    write('ANY', range(0x110000))
    write('ASCII', range(0x80))
    write('BLANK', matches(r'[\p{Zs}\t]'))
    # Of other versions, with names that an expression cannot have: normal forms and StripAccents have 9, Punctuation 8,
    # Digits 17. Some characters have changed their category since.
    write('9_ASSIGNED', (code for code in CODES if is_of(code, (9, 0))))
    write('9_M', {code for code in matches(r'\p{M}') if is_of(code, (9, 0))} - {0x111C9} | {0x1CF2, 0x1CF3})
    write('8_P', {code for code in matches(r'\p{P}') if is_of(code, (8, 0))} | {0x166D, 0x111C9})
    write('17_N', {*matches(r'\p{N}'), *range(0x11DE0, 0x11DEA), 0x16FF4, 0x16FF5, 0x16FF6})
    for names, parts in UNIONS.items():
        print(f'UNION("{names}", "{parts}")')

def write_named(all_names, names, codes):
    names = sorted(names + [ALIASES[name] for name in names if name in ALIASES], key=len)
    assert not all_names & set(names), all_names & set(names)
    all_names.update(names)
    write(' '.join(dict.fromkeys(names)), codes)

if __name__ == '__main__':
    main()
