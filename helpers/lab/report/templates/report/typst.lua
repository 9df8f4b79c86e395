-- What pandoc's Typst writer is told about a notebook: raw HTML is read, text stays literal, tables are
-- handed to `data-table` of style.typ, and images are marked so that Python finds their files.

local function quoted(text)
  return '"' .. text:gsub('[\\"]', '\\%0') .. '"'
end

local function raw(text) return pandoc.RawInline('typst', text) end

---------------------------------------------------------------------------------------------- raw HTML
-- `<sup>` and `<sub>` change what a number says, so they are kept. Of other tags the text is kept, and what is
-- no tag of HTML, as in "results/<gpu>", is text.

local wrappers = {sub = pandoc.Subscript, sup = pandoc.Superscript, b = pandoc.Strong, strong = pandoc.Strong,
                  i = pandoc.Emph, em = pandoc.Emph}

local known = {}
for name in ('a abbr b big br center cite code del details div dfn em font h i img ins kbd mark p q s samp small span '
  .. 'strike strong sub summary sup table tbody td th thead tr tt u var'):gmatch('%a+') do known[name] = true end

local function tag_of(inline)
  if inline.t ~= 'RawInline' or inline.format ~= 'html' then return nil end
  local slash, name = inline.text:match('^<(/?)(%a+)')
  return name and (slash .. name:lower())
end

local function is_text(inline)
  if inline.t ~= 'RawInline' or inline.format ~= 'html' then return true end
  return not inline.text:match('^<!') and not known[(tag_of(inline) or ''):match('%a+')]
end

local function read_inlines(inlines)
  local result, i = pandoc.Inlines {}, 1
  while i <= #inlines do
    local tag, close = tag_of(inlines[i]), nil
    if tag == 'br' then
      result:insert(pandoc.LineBreak())
    elseif tag == 'img' then
      result:extend(pandoc.utils.blocks_to_inlines(pandoc.read(inlines[i].text, 'html').blocks))
    elseif tag and wrappers[tag] then
      for j = i + 1, #inlines do
        if tag_of(inlines[j]) == '/' .. tag then close = j break end
      end
      if close then
        local inside = pandoc.Inlines {}
        for j = i + 1, close - 1 do inside:insert(inlines[j]) end
        result:insert(wrappers[tag](read_inlines(inside)))
        i = close
      end
    elseif is_text(inlines[i]) then
      result:insert(tag and pandoc.Str(inlines[i].text) or inlines[i])
    end
    i = i + 1
  end
  return result
end

local html = {
  Inlines = read_inlines,
  RawBlock = function(block)
    if block.format == 'html' then return pandoc.read(block.text, 'html').blocks end
  end,
}

------------------------------------------------------------------------------------------ literal text
-- In Typst's markup `...`, `--`, `1.` and a `=` at the start of a cell mean something; in a string nothing does.

local function literal(str)
  local plain = not str.text:match('[^%w,;:()!?%.\128-\255]')
  if plain and not str.text:find('..', 1, true) and not str.text:match('^%d+%.$') then return nil end
  return raw('#' .. quoted(str.text) .. ';')
end

local function link(element)
  if element.target:match('^%a[%w+.-]*:') then return nil end
  local notebook = element.target:match('^([%w_.-]+)%.ipynb$')
  if not notebook then return element.content end -- another relative link leads nowhere from a PDF
  local parts = pandoc.Inlines {raw('#chapter-link(' .. quoted(notebook) .. ')[')}
  parts:extend(element.content)
  parts:insert(raw('];'))
  return parts
end

-- U+E000 marks a path that Python must replace: no notebook writes it.
local function picture(image, where)
  local alt = pandoc.utils.stringify(image.caption)
  local call = '#' .. where .. '("\u{E000}' .. image.src .. '\u{E000}", alt: ' .. quoted(alt)
  if where == 'picture' and image.title ~= '' then call = call .. ', caption: ' .. quoted(image.title) end
  return call .. ')'
end

-- Typst keeps the space between a word and what follows it, and puts none between the columns of `cases`.
local function math(formula)
  local typst = pandoc.write(pandoc.Pandoc {pandoc.Plain {formula}}, 'typst', {wrap_text = 'none'})
  typst = typst:gsub('%s+$', ''):gsub('" \\%(', '"\\(')
  typst = typst:gsub('cases(%b())', function(rows) return 'cases' .. rows:gsub(' & ', ' & quad ') end)
  return raw(typst)
end

local text = {
  Str = literal,
  Math = math,
  Code = function(code) return raw('#raw(' .. quoted(code.text) .. ');') end,
  Link = link,
  Image = function(image) return raw(picture(image, 'inline-picture') .. ';') end,
}

---------------------------------------------------------------------------------------------- headings
-- Headings are numbered by Typst, so a number that the author typed ("# 3. Profiling") goes.

local function heading(header)
  local first = header.content[1]
  if first and first.t == 'Str' and first.text:match('^%d[%d.]*%.$') then
    header.content:remove(1)
    if header.content[1] and header.content[1].t == 'Space' then header.content:remove(1) end
  end
  header.identifier = ''
  return header
end

local function paragraph(block)
  if #block.content == 1 and block.content[1].t == 'Image' then
    return pandoc.RawBlock('typst', picture(block.content[1], 'picture'))
  end
end

local blocks = {Header = heading, Para = paragraph, Plain = paragraph,
                Div = function(div) return div.content end}

local tables = dofile(pandoc.path.join {pandoc.path.directory(PANDOC_SCRIPT_FILE), 'tables.lua'})
return {html, blocks, tables(text), text}
