//! Patterns for names, as in shells and `find`.
//!
//! `*` matches any characters, `?` one character, `[a-z]` one of these, `[!a-z]` any other one; a
//! backslash escapes the next character. Slashes and leading dots are not special, as in `find
//! -name`. Names can be any bytes: each byte that is not UTF-8 counts as one character.

/// A parsed pattern.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Glob {
    parts: Vec<Part>,
    ignores_case: bool,
}

#[derive(Debug, Clone, PartialEq, Eq)]
enum Part {
    One(Character),
    AnyOne,
    Any,
    Class { excludes: bool, ranges: Vec<(Character, Character)> },
}

/// A character, or, in the values after them, a byte that is not UTF-8.
type Character = u32;

/// The value of the first such byte.
const FOREIGN: Character = 0x0011_0000;

fn characters(bytes: &[u8], folds: bool) -> Vec<Character> {
    let mut characters = Vec::new();
    for chunk in bytes.utf8_chunks() {
        for character in chunk.valid().chars() {
            if folds {
                characters.extend(character.to_lowercase().map(Character::from))
            } else {
                characters.push(character.into())
            }
        }
        characters.extend(chunk.invalid().iter().map(|&byte| FOREIGN + Character::from(byte)));
    }
    characters
}

impl Glob {
    /// Parses a pattern. Every byte string is valid: an unterminated bracket stands for itself.
    pub fn new(pattern: &[u8], ignores_case: bool) -> Glob {
        let pattern = characters(pattern, ignores_case);
        let mut parts = Vec::new();
        let mut rest = &pattern[..];
        while let Some((&first, behind)) = rest.split_first() {
            rest = behind;
            parts.push(match char::from_u32(first) {
                Some('*') => Part::Any,
                Some('?') => Part::AnyOne,
                Some('[') => match class(behind) {
                    Some((class, behind)) => {
                        rest = behind;
                        class
                    }
                    None => Part::One(first),
                },
                Some('\\') => match behind.split_first() {
                    Some((&next, behind)) => {
                        rest = behind;
                        Part::One(next)
                    }
                    None => Part::One(first),
                },
                _ => Part::One(first),
            });
        }
        Glob { parts, ignores_case }
    }

    /// Whether the pattern matches the whole name.
    pub fn matches(&self, name: &[u8]) -> bool {
        let name = characters(name, self.ignores_case);
        let (mut part, mut at) = (0, 0);
        // The last `*` and the end of its match so far: backtracking to an earlier one is never
        // needed.
        let mut star: Option<(usize, usize)> = None;
        while at < name.len() {
            match self.parts.get(part) {
                Some(Part::Any) => {
                    star = Some((part, at));
                    part += 1;
                    continue;
                }
                Some(one) if one.is(name[at]) => {
                    part += 1;
                    at += 1;
                    continue;
                }
                _ => {}
            }
            let Some((star_part, reach)) = star else { return false };
            star = Some((star_part, reach + 1));
            (part, at) = (star_part + 1, reach + 1);
        }
        self.parts[part..].iter().all(|part| *part == Part::Any)
    }
}

impl Part {
    fn is(&self, character: Character) -> bool {
        match self {
            Part::One(one) => *one == character,
            Part::AnyOne => true,
            Part::Any => false,
            Part::Class { excludes, ranges } => {
                let is_among = |&(first, last)| (first..=last).contains(&character);
                ranges.iter().any(is_among) != *excludes
            }
        }
    }
}

/// Parses a class after its opening bracket; returns it and the rest of the pattern.
fn class(text: &[Character]) -> Option<(Part, &[Character])> {
    let is = |at: usize, wanted: char| text.get(at) == Some(&Character::from(wanted));
    let excludes = is(0, '!') || is(0, '^');
    let start = usize::from(excludes);
    let mut at = start;
    let mut ranges = Vec::new();
    // A bracket in the first position is a member of the class.
    while at == start || !is(at, ']') {
        let first = *text.get(at)?;
        if is(at + 1, '-') && !is(at + 2, ']') {
            ranges.push((first, *text.get(at + 2)?));
            at += 3;
        } else {
            ranges.push((first, first));
            at += 1;
        }
    }
    Some((Part::Class { excludes, ranges }, &text[at + 1..]))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn matches(pattern: &str, name: &str) -> bool {
        Glob::new(pattern.as_bytes(), false).matches(name.as_bytes())
    }

    #[test]
    fn patterns_mean_what_they_mean_to_find() {
        for (pattern, name, is_match) in [
            ("", "", true),
            ("", "a", false),
            ("*", "", true),
            ("*", ".hidden", true),
            ("*.txt", "a.txt", true),
            ("*.txt", "a.txt.gz", false),
            ("a*b*c", "aXbYbZc", true),
            ("a*b*c", "aXbYbZ", false),
            ("**a", "ba", true),
            ("?", "ä", true),
            ("?", "ab", false),
            ("[a-c]x", "bx", true),
            ("[!a-c]x", "bx", false),
            ("[^a-c]x", "dx", true),
            ("[]]", "]", true),
            ("[a-]", "-", true),
            ("[a", "[a", true),
            ("\\*", "*", true),
            ("\\*", "a", false),
            ("a\\", "a\\", true),
            ("*\n*", "a\nb", true),
        ] {
            assert_eq!(matches(pattern, name), is_match, "{pattern:?} {name:?}");
        }
        assert!(Glob::new(b"*.TXT", true).matches(b"a.txt"));
        assert!(Glob::new(b"?", false).matches(b"\xff"));
        assert!(!Glob::new(b"?", false).matches(b"\xff\xfe"));
        assert!(Glob::new(b"a\xff*", false).matches(b"a\xffb"));
        assert!(!Glob::new("ÿ".as_bytes(), false).matches(b"\xff"));
    }

    #[test]
    fn many_stars_take_no_time() {
        let pattern = "*a".repeat(50);
        assert!(!matches(&format!("{pattern}b"), &"a".repeat(255)));
    }
}
