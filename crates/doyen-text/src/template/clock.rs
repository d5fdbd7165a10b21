//! The time that templates may ask for with `strftime_now`.

use std::time::{SystemTime, UNIX_EPOCH};

const MONTHS: [&str; 12] = [
    "January",
    "February",
    "March",
    "April",
    "May",
    "June",
    "July",
    "August",
    "September",
    "October",
    "November",
    "December",
];
const DAYS: [&str; 7] = ["Sunday", "Monday", "Tuesday", "Wednesday", "Thursday", "Friday", "Saturday"];

/// A date and time of day, without a time zone.
///
/// `transformers` uses local time. The standard library knows none, so [`Now::utc`] is what a caller has unless
/// it brings its own offset by [`Now::from_unix`].
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Now {
    /// Days since 1970-01-01.
    days: i64,
    /// Seconds since midnight.
    seconds: u32,
}

impl Now {
    /// The present time in UTC.
    pub fn utc() -> Self {
        let seconds = SystemTime::now().duration_since(UNIX_EPOCH).map_or(0, |d| d.as_secs());
        Self::from_unix(i64::try_from(seconds).unwrap_or(i64::MAX))
    }

    /// The time `seconds` after 1970-01-01 00:00 (add an offset from UTC for local time).
    pub const fn from_unix(seconds: i64) -> Self {
        Self { days: seconds.div_euclid(86_400), seconds: seconds.rem_euclid(86_400) as u32 }
    }

    /// Formats as Python's `datetime.strftime` in the C locale.
    ///
    /// Known are `%a %A %b %B %c %d %D %e %f %F %H %I %j %m %M %n %p %S %t %T %u %w %x %X %y %Y %%`, `%-` before a
    /// number to leave out its padding, and `%z %Z` (empty, there is no zone). Others stay as they are.
    pub fn strftime(&self, format: &str) -> String {
        let mut out = String::with_capacity(format.len() + 16);
        let mut chars = format.chars();
        while let Some(c) = chars.next() {
            if c != '%' {
                out.push(c);
                continue;
            }
            let mut code = chars.clone();
            let padded = if code.as_str().starts_with('-') {
                code.next();
                false
            } else {
                true
            };
            match code.next() {
                Some(letter) if self.field(letter, padded, &mut out) => chars = code,
                _ => out.push('%'),
            }
        }
        out
    }

    /// Appends one field; false for a letter that is not known.
    fn field(&self, letter: char, padded: bool, out: &mut String) -> bool {
        let (year, month, day) = self.date();
        let (hour, minute, second) = (self.seconds / 3600, self.seconds / 60 % 60, self.seconds % 60);
        let weekday = (self.days + 4).rem_euclid(7) as usize;
        let hour12 = (hour + 11) % 12 + 1;
        let month_name = MONTHS[month as usize - 1];
        let number = |width: usize, value: u32| {
            if padded { format!("{value:0width$}") } else { value.to_string() }
        };
        let text = match letter {
            'a' => DAYS[weekday][..3].to_owned(),
            'A' => DAYS[weekday].to_owned(),
            'b' | 'h' => month_name[..3].to_owned(),
            'B' => month_name.to_owned(),
            'c' => self.strftime("%a %b %e %H:%M:%S %Y"),
            'd' => number(2, day),
            'D' | 'x' => self.strftime("%m/%d/%y"),
            'e' if padded => format!("{day:2}"),
            'e' => day.to_string(),
            'f' => "000000".to_owned(),
            'F' => self.strftime("%Y-%m-%d"),
            'H' => number(2, hour),
            'I' => number(2, hour12),
            'j' => number(3, self.day_of_year()),
            'm' => number(2, month),
            'M' => number(2, minute),
            'n' => "\n".to_owned(),
            'p' => if hour < 12 { "AM" } else { "PM" }.to_owned(),
            'S' => number(2, second),
            't' => "\t".to_owned(),
            'T' | 'X' => self.strftime("%H:%M:%S"),
            'u' => (if weekday == 0 { 7 } else { weekday }).to_string(),
            'w' => weekday.to_string(),
            'y' => number(2, year.rem_euclid(100) as u32),
            'Y' => year.to_string(),
            'z' | 'Z' => String::new(),
            '%' => "%".to_owned(),
            _ => return false,
        };
        out.push_str(&text);
        true
    }

    /// Year, month (from 1), day (from 1) in the Gregorian calendar.
    ///
    /// Counts in eras of 400 years (146097 days) that begin on March 1st, so that the leap day comes last.
    fn date(&self) -> (i64, u32, u32) {
        let days = self.days + 719_468;
        let era = days.div_euclid(146_097);
        let day_of_era = days.rem_euclid(146_097);
        let year_of_era =
            (day_of_era - day_of_era / 1_460 + day_of_era / 36_524 - day_of_era / 146_096) / 365;
        let day_of_year = day_of_era - (365 * year_of_era + year_of_era / 4 - year_of_era / 100);
        let month_from_march = (5 * day_of_year + 2) / 153;
        let day = (day_of_year - (153 * month_from_march + 2) / 5 + 1) as u32;
        let month = if month_from_march < 10 { month_from_march + 3 } else { month_from_march - 9 } as u32;
        (era * 400 + year_of_era + i64::from(month <= 2), month, day)
    }

    fn day_of_year(&self) -> u32 {
        let (year, month, day) = self.date();
        let leap = (year % 4 == 0 && year % 100 != 0) || year % 400 == 0;
        let before = [0, 31, 59, 90, 120, 151, 181, 212, 243, 273, 304, 334][month as usize - 1];
        before + day + u32::from(leap && month > 2)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Expected texts by Python's `datetime.strftime`.
    #[test]
    fn formats_as_python() {
        let cases = [
            (1_709_210_096, "%Y-%m-%d %H:%M:%S", "2024-02-29 12:34:56"),
            (1_709_210_096, "%d %b %Y", "29 Feb 2024"),
            (1_709_210_096, "%A, %B %-d, %Y", "Thursday, February 29, 2024"),
            (1_709_210_096, "%a %e %j %I:%M %p %y %w %u %%", "Thu 29 060 12:34 PM 24 4 4 %"),
            (
                1_709_210_096,
                "%c|%x|%X|%D|%F|%T",
                "Thu Feb 29 12:34:56 2024|02/29/24|12:34:56|02/29/24|2024-02-29|12:34:56",
            ),
            (0, "%F %A %I %p %-I %-j", "1970-01-01 Thursday 12 AM 12 1"),
            (951_782_400, "%F %j %a", "2000-02-29 060 Tue"),
            (4_107_542_399, "%F %j %T", "2100-02-28 059 23:59:59"),
            (4_107_542_400, "%F %j", "2100-03-01 060"),
            (-1, "%F %T", "1969-12-31 23:59:59"),
            (1_735_603_200, "%F %j %-m/%-d %e", "2024-12-31 366 12/31 31"),
            (1_735_689_600, "%F %e %Z|%z|%Q%", "2025-01-01  1 ||%Q%"),
        ];
        for (seconds, format, expected) in cases {
            assert_eq!(Now::from_unix(seconds).strftime(format), expected, "{seconds} {format}");
        }
        assert!(Now::utc().strftime("%Y").parse::<u32>().unwrap() >= 2024);
    }
}
