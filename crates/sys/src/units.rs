//! Human-readable sizes.

use std::fmt;
use std::str::FromStr;

/// A number of bytes: parses `256M`, `1.5 GiB`, `4096`; prints `256 MiB`. The units are powers of
/// 1024.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub struct Bytes(pub u64);

impl Bytes {
    /// Returns the size as used in a metric's name: `32k`.
    pub fn suffix(self) -> String {
        for (unit, shift) in [("g", 30), ("m", 20), ("k", 10)] {
            let whole = self.0 >> shift;
            if whole > 0 && whole << shift == self.0 {
                return format!("{whole}{unit}");
            }
        }
        self.0.to_string()
    }
}

impl fmt::Display for Bytes {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        for (unit, shift) in [("TiB", 40), ("GiB", 30), ("MiB", 20), ("KiB", 10)] {
            if self.0 >> shift > 0 {
                let value = self.0 as f64 / (1_u64 << shift) as f64;
                let text = format!("{value:.1}");
                return write!(f, "{} {unit}", text.strip_suffix(".0").unwrap_or(&text));
            }
        }
        write!(f, "{} bytes", self.0)
    }
}

impl FromStr for Bytes {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        let wrong = || format!("`{text}` is not a size; write for example 256M, 2GiB or 65536");
        let text = text.trim();
        let digits = text.find(|c: char| !c.is_ascii_digit() && c != '.').unwrap_or(text.len());
        let (number, unit) = text.split_at(digits);
        let shift: u32 = match unit.trim().to_ascii_lowercase().as_str() {
            "" | "b" => 0,
            "k" | "kb" | "kib" => 10,
            "m" | "mb" | "mib" => 20,
            "g" | "gb" | "gib" => 30,
            "t" | "tb" | "tib" => 40,
            _ => return Err(wrong()),
        };
        if let Ok(number) = number.parse::<u64>() {
            return number.checked_mul(1 << shift).map(Self).ok_or_else(wrong);
        }
        let bytes = number.parse::<f64>().map_err(|_| wrong())? * (1_u64 << shift) as f64;
        // Above 2^53 not every integer is representable.
        let is_whole = bytes.fract() == 0.0 && bytes < (1_u64 << 53) as f64;
        if is_whole { Ok(Self(bytes as u64)) } else { Err(wrong()) }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn sizes_in_names() {
        assert_eq!(Bytes(4 << 20).suffix(), "4m");
        assert_eq!(Bytes(1 << 30).suffix(), "1g");
        assert_eq!(Bytes((1 << 20) + 1024).suffix(), "1025k");
        assert_eq!(Bytes(7).suffix(), "7");
    }

    #[test]
    fn sizes_parse_and_print() {
        assert_eq!("256M".parse(), Ok(Bytes(256 << 20)));
        assert_eq!("2 GiB".parse(), Ok(Bytes(2 << 30)));
        assert_eq!("4096".parse(), Ok(Bytes(4096)));
        assert_eq!("1.5G".parse(), Ok(Bytes(1536 << 20)));
        assert_eq!("0.25 KiB".parse(), Ok(Bytes(256)));
        for wrong in ["", "M", ".", "1.5", "1.2.3G", "0.3K", "-1", "1X", "99999999T"] {
            assert!(wrong.parse::<Bytes>().is_err(), "{wrong}");
        }
        assert_eq!(Bytes(256 << 20).to_string(), "256 MiB");
        assert_eq!(Bytes(1536 << 20).to_string(), "1.5 GiB");
        assert_eq!(Bytes(12).to_string(), "12 bytes");
    }
}
